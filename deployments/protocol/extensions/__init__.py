"""What extensions send between processes."""
