"""Adapters: what differs between DeepSpeed, FSDP2 and DDP, one file each."""
