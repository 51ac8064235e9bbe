"""Which rank the others wait for, by when each rank launches its collectives; free of torch."""
