"""GPUs of one host, by their copy engines."""
