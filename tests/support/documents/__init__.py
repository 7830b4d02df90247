"""What is written runs: code blocks of pages, and the example that trains a GPT."""
