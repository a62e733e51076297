"""The steps by which a difference is decided, one file each."""
