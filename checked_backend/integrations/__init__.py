"""Places in other libraries: a module for each, which imports that library; nothing here loads any."""
