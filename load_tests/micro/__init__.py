"""Whether reuse changes answers (`exactness`); the manager by the size of its index, and rebuilt (`manager_scale`)."""
