"""``python -m sshsdp``."""

from sshsdp.cli import main

main()
