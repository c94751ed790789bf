"""The embedded engine: Hugging Face models on a paged KV pool, one process, one OpenAI-compatible port."""
