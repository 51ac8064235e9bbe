"""Choose where the ranks of a job meet (interface, address, port), and make the variables that workers get."""
