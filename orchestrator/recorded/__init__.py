"""What runs leave behind and how it is found again: MLflow, its mirror, published results, tables of them."""
