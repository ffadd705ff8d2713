"""thinwire in other people's loops: a file each, and each needs the extra of its name (thinwire[lightning])."""
