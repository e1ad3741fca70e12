"""What a run will need: memory, bytes on the wire and time per step, from shapes alone.

`sshsdp plan` prints it. Nothing here starts a process group or allocates parameters.
"""
