"""HTML files that people look at, and the pictures in them."""
