"""`genbatch plan`: predicts how many replicas a load needs."""
