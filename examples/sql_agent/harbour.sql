-- A harbour and what goes through it: the agent is judged here, and learns nothing on it.
CREATE TABLE port (port_id INTEGER PRIMARY KEY, depth INTEGER, origin TEXT);
INSERT INTO port VALUES
    (1, 50, 'south'), (2, 25, 'north'), (3, 60, 'west'), (4, 90, 'south'), (5, 15, 'north'), (6, 15, 'south');
CREATE TABLE ship (ship_id INTEGER PRIMARY KEY, port_id INTEGER REFERENCES port, length INTEGER, color TEXT);
INSERT INTO ship VALUES
    (1, 1, 35, 'green'), (2, 1, 10, 'red'), (3, 6, 20, 'green'), (4, 5, 65, 'red'), (5, 5, 60, 'green'),
    (6, 4, 15, 'red'), (7, 2, 40, 'red'), (8, 5, 80, 'red'), (9, 3, 60, 'blue');
CREATE TABLE farm (farm_id INTEGER PRIMARY KEY, size INTEGER, city TEXT);
INSERT INTO farm VALUES
    (1, 25, 'silk'), (2, 75, 'oak'), (3, 25, 'oak'), (4, 80, 'silk'), (5, 45, 'silk'), (6, 80, 'silk');
CREATE TABLE box (box_id INTEGER PRIMARY KEY, ship_id INTEGER REFERENCES ship, farm_id INTEGER REFERENCES farm, weight INTEGER, label TEXT);
INSERT INTO box VALUES
    (1, 8, 3, 30, 'cold'), (2, 4, 2, 55, 'soft'), (3, 4, 1, 20, 'soft'), (4, 5, 5, 80, 'cold'),
    (5, 6, 6, 15, 'cold'), (6, 5, 5, 80, 'dry'), (7, 2, 5, 15, 'cold'), (8, 3, 3, 85, 'dry'),
    (9, 8, 4, 35, 'dry'), (10, 2, 5, 70, 'soft'), (11, 6, 3, 95, 'soft'), (12, 6, 5, 75, 'cold'),
    (13, 8, 1, 60, 'dry'), (14, 5, 4, 50, 'soft'), (15, 2, 1, 65, 'soft'), (16, 5, 6, 80, 'soft');
CREATE TABLE seed (seed_id INTEGER PRIMARY KEY, box_id INTEGER REFERENCES box, cost INTEGER, kind TEXT);
INSERT INTO seed VALUES
    (1, 13, 95, 'sweet'), (2, 9, 65, 'old'), (3, 14, 45, 'sweet'), (4, 9, 55, 'sweet'), (5, 14, 95, 'wild'),
    (6, 13, 50, 'old'), (7, 5, 10, 'old'), (8, 6, 65, 'old'), (9, 8, 55, 'sweet'), (10, 8, 30, 'old'),
    (11, 16, 85, 'sweet'), (12, 6, 20, 'wild'), (13, 10, 70, 'old'), (14, 5, 15, 'wild'),
    (15, 12, 35, 'sweet'), (16, 11, 95, 'old'), (17, 2, 25, 'wild'), (18, 13, 40, 'wild'),
    (19, 13, 60, 'wild'), (20, 4, 80, 'wild'), (21, 13, 85, 'old'), (22, 7, 20, 'old'), (23, 7, 90, 'wild'),
    (24, 6, 95, 'old');
