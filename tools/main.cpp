#include <cstdio>
int main() { std::puts("ebb"); }
