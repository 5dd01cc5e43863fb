"""Models that were written elsewhere: their expert blocks computed by grouped products, in place."""
