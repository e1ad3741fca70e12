"""Tests of `sshsdp`; folders mirror the packages."""
