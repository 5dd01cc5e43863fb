"""From one layout to another: planned as steps, then carried out."""
