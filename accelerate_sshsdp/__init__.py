"""Hugging Face Accelerate support for `sshsdp`."""
