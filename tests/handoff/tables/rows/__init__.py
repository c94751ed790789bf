"""A scenario for each row of each table; importing a module registers its scenarios."""
