#!/bin/sh
echo pump
