"""The lab: N hosts on one machine behind an emulated network that changes.

Nothing is imported here: the relay and the programs inside hosts start without torch, and come in by this door.
"""
