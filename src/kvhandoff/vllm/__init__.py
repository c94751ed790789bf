"""The integration with vLLM: a KV connector for stock engines, loaded as a plugin."""
