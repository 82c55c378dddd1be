"""`genbatch plan`: how many replicas a load needs, before they are there."""
