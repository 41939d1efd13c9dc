"""Islands: local updates and exchanges between them."""
