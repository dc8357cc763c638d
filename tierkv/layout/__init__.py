"""What a model's KV looks like, and where its bytes lie in a chunk."""
