"""The training loops of other libraries, made exact. Each module needs its library; this package imports none."""
