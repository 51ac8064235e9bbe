"""Models, data, sites and users that the authors did not have in mind."""
