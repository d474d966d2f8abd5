"""Orders: 16 to learn from, 12 that choose between candidates, 60 held out."""

from world import make

train = make(16, "train0") + make(12, "val0")
heldout = make(60, "test")
