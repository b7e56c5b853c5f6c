"""What is trained: the catalogue of models, the data, and the ranks that train."""
