"""What is wrong with this network, before a training finds out: `thinwire doctor`."""
