"""One pass over a home, from its source to its dimensions, and the proof that source and dimensions are
equal."""
