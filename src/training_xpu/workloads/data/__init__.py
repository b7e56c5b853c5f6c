"""Real text for training: where it comes from, how it becomes tokens, and the batches ranks take from them.

`prepare` runs once in the launcher and needs no torch; `batches` is what ranks use. Nothing here uses the network.
"""
