"""Making model directories: GGUF to bf16, and bf16 to a ParoQuant checkpoint."""
