"""Events of a source: landed batches become raw events; these are judged once, accepted or quarantined."""
