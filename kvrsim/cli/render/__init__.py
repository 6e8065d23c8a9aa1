"""One file a result, as text for people. Imported only where no JSON is asked for."""
