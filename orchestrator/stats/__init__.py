"""The statistics of a decision: pure functions of numbers. numpy and scipy are imported inside them, where used."""
