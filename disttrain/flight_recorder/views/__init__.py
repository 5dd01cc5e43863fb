"""An analysis as text, as a page, as a trace."""
