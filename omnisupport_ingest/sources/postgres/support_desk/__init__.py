"""The support desk: a small, realistic source database and the traffic on it."""
