"""Each machine on the stage: its states, its effects, and how to lead it somewhere."""
