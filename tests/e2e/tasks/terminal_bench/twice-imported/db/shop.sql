PRAGMA foreign_keys = ON;
CREATE TABLE customers (id INTEGER PRIMARY KEY, email TEXT NOT NULL, name TEXT, imported TEXT NOT NULL);
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER NOT NULL, cents INTEGER NOT NULL);
CREATE TABLE vouchers (code TEXT PRIMARY KEY, given_to INTEGER REFERENCES customers ON DELETE CASCADE);
CREATE TABLE newsletters (customer INTEGER NOT NULL REFERENCES customers ON DELETE CASCADE, topic TEXT NOT NULL, PRIMARY KEY (customer, topic));
INSERT INTO customers VALUES
  (1, 'ada@example.org', 'Ada', '2026-01-01'), (2, 'Bob@Example.org', NULL, '2026-01-01'), (3, 'eve@example.org', 'Eve', '2026-01-02'),
  (7, ' ADA@example.org', 'Ada L.', '2026-02-01'), (8, 'bob@example.org ', 'Bob', '2026-01-15'), (9, 'bob@example.org', '', '2026-02-01'),
  (10, 'dan@example.org', 'Dan', '2026-02-01'), (11, 'ada@example.ORG', NULL, '2026-02-02'), (12, 'Eva@example.org', 'Eva', '2026-02-01');
INSERT INTO orders VALUES (1, 1, 1000), (2, 2, 250), (3, 3, 999), (4, 7, 500), (5, 8, 75), (6, 9, 30), (7, 10, 1), (8, 11, 4), (9, 12, 60);
INSERT INTO vouchers VALUES ('SPRING', 7), ('SUMMER', 9), ('AUTUMN', 3), ('WINTER', NULL), ('BIRTHDAY', 11);
INSERT INTO newsletters VALUES (1, 'news'), (7, 'news'), (7, 'sales'), (11, 'sales'), (2, 'news'), (9, 'sales'), (12, 'news');
