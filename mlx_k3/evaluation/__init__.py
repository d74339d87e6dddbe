"""How good a loaded model is: right answers by family of tasks, and perplexity of texts."""
