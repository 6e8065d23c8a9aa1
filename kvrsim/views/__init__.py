"""Views: what a result looks like as a figure, as a page, and in a notebook."""
