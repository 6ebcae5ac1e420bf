"""Models as people have them: GGUF files and Hugging Face folders, weights and tokenizers."""
