"""The main job: train a model over a network, watch it, compare methods.

Nothing is imported here: the command line reads a job and starts its workers without torch.
"""
