"""The OpenAI-compatible front: fleet view, path policy, the two legs of a request, and its record."""
