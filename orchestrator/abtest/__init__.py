"""An A/B from its plan to its last boot: design, order, attempts, hours. It judges nothing."""
