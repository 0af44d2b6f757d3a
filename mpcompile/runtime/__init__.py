"""What lives between calls: traced updates, tensor tables, launches and custom ops."""
