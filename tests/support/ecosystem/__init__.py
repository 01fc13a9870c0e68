"""Models, training and shardings that the tests of other people's libraries share."""
