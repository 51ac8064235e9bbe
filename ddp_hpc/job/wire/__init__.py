"""How the supervisor and the nodes' processes reach each other."""
