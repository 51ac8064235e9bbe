"""Questions to a site before anything is submitted: what is right, what is not, what is not known, and what to do."""
