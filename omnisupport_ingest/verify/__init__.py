"""One pass over a home from its source to its dimensions, and the proof that the two are equal."""
