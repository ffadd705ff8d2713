"""Which exchange to use, at which ratio: decided from numbers only, never from tensors."""
