// Which sources a library was built from, so that a stale one is noticed.

extern "C" const char* curvadion_sources() { return CURVADION_SOURCES; }
